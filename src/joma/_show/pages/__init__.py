"""The page: one self-contained HTML file from what runs, exhibits and claims wrote."""
