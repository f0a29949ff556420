"""Experiments that single exhibits and claims use."""
