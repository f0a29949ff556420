"""The Eqn. 6 explorer: the controls; ``assets/explorer.js`` solves and draws."""

from joma._report.document import Page
from joma._report.typeset import typeset


def explorer_section(page: Page) -> str:
    """Choose how spread μ is, let time run, see v(t), attention and its entropy move."""
    page.contents.append(("explorer", "Explore Eqn. 6", ""))
    equation = typeset(r"$\dot v=(\mu-v)\circ e^{v^2/2}$")
    return f"""<section id="explorer" aria-labelledby="explorer-title"><h2 id="explorer-title">Explore Eqn. 6</h2>
<p>Ten components move to their targets μ by {equation}, from v = 0. The larger a target, the more attention the component
attracts, and the faster it grows: attention turns sparse. When the others arrive, it turns dense again. The solution
is exact, as in <code>joma.theory.solve_bounce</code>. (Eqn. 6 is itself an approximation: see claim E6.)</p>
<div class="explorer"><div class="controls">
<div><label for="x-spread">Spread of μ <output id="x-spread-out" for="x-spread"></output></label>
<input type="range" id="x-spread" min="0" max="2.4" step="0.05" value="1.5"></div>
<div><label for="x-centre">Centre of μ <output id="x-centre-out" for="x-centre"></output></label>
<input type="range" id="x-centre" min="0.5" max="3" step="0.1" value="2.5"></div></div>
<div class="panels">
<div><h3>v(t), on its way to μ</h3><svg id="x-v" role="img" aria-label="The components of v over time"></svg></div>
<div><h3>Attention at time t</h3><svg id="x-a" role="img" aria-label="Attention on each component at the chosen time"></svg></div>
<div><h3>Attention entropy (nats)</h3><svg id="x-h" role="img" aria-label="Attention entropy over time"></svg></div></div>
<div class="time"><button type="button" id="x-play">Play</button>
<input type="range" id="x-time" min="0" max="500" value="0" aria-label="Time"></div>
<p class="now" id="x-now" aria-live="polite"></p></div></section>"""
