"""Colours, the same in charts and text, for light and dark; and the page's CSS."""

import colorsys
from collections.abc import Sequence
from typing import NamedTuple


class Colour(NamedTuple):
    """A colour on a light background, and on a dark one."""

    light: str
    dark: str


# What is no data. Each is a colour of its own, since it is found in a chart by it.
INK = {
    "ink": Colour("#1f2430", "#e6e9ef"),
    "muted": Colour("#667080", "#98a2b3"),
    "grid": Colour("#e4e7ec", "#2f3542"),
    "mark": Colour("#98a1af", "#6b7485"),
}
PARTS = (
    Colour("#2b7a53", "#4fb286"),
    Colour("#d9a21b", "#e3b341"),
    Colour("#8157b8", "#a98ae0"),
    Colour("#2d8fb5", "#56b6dc"),
    Colour("#c4613d", "#e08a68"),
    Colour("#b9c0ca", "#4d5563"),
)
_SERIES = (
    Colour("#1d66b5", "#6cb0ff"),
    Colour("#d4551a", "#ff9a62"),
    Colour("#1a8a62", "#4cd0a0"),
    Colour("#a2439b", "#e394dc"),
    Colour("#ad8700", "#e8c547"),
    Colour("#0f93a8", "#5cd6e6"),
    Colour("#c02f56", "#ff8aa6"),
    Colour("#6a5acd", "#aba2ff"),
    Colour("#6f8a12", "#b9d957"),
    Colour("#7a5c46", "#cfae92"),
)


def series(count: int) -> list[Colour]:
    """Colours for so many runs or groups; beyond ten they go around the circle, and neighbours are near."""
    if count <= len(_SERIES):
        return list(_SERIES[:count])
    hues = [0.62 + 0.9 * index / count for index in range(count)]
    return [Colour(_hex(hue, 0.40, 0.72), _hex(hue, 0.68, 0.80)) for hue in hues]


def variables(colours: Sequence[Colour]) -> dict[str, Colour]:
    """All colours under the names of their CSS variables."""
    return (
        INK
        | {f"p{index}": colour for index, colour in enumerate(PARTS)}
        | {f"c{index}": colour for index, colour in enumerate(colours)}
    )


def css(colours: Sequence[Colour]) -> str:
    """The page's style sheet."""
    named = variables(colours).items()
    light = ";".join(f"--{name}:{colour.light}" for name, colour in named)
    dark = ";".join(f"--{name}:{colour.dark}" for name, colour in named)
    return (
        f":root{{{light};--paper:#ffffff;--panel:#f6f7f9;--line:#d9dde3;--changed:#fff1c2}}\n"
        "@media screen and (prefers-color-scheme:dark){"
        f":root{{{dark};--paper:#14171d;--panel:#1c2028;--line:#333a47;--changed:#4a3d12}}}}\n{_CSS}"
    )


def _hex(hue: float, lightness: float, saturation: float) -> str:
    parts = colorsys.hls_to_rgb(hue % 1.0, lightness, saturation)
    return "#" + "".join(f"{round(255 * part):02x}" for part in parts)


_CSS = """
:root{color-scheme:light dark}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0 auto;padding:1.6rem clamp(.8rem,3vw,2.4rem) 3rem;max-width:1440px;background:var(--paper);
 color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
h1{font-size:1.65rem;line-height:1.25;margin:0 0 .15rem;overflow-wrap:anywhere}
h2{font-size:1.2rem;margin:2.4rem 0 .8rem;padding-bottom:.3rem;border-bottom:1px solid var(--line)}
h3{font-size:.95rem;margin:0;font-weight:600}
p{margin:.4rem 0;max-width:75em}
.sub,.note,footer{color:var(--muted);font-size:.87rem}
.sub{margin:0 0 1.1rem;overflow-wrap:anywhere}
.charts{display:grid;grid-template-columns:minmax(0,1fr);gap:1rem}
@media(min-width:820px){.charts{grid-template-columns:repeat(2,minmax(0,1fr))}}
figure{margin:0;padding:.8rem .9rem .6rem;background:var(--panel);border-radius:8px;break-inside:avoid;min-width:0}
figure header{display:flex;justify-content:space-between;align-items:baseline;gap:1rem}
figure header a{font-size:.75rem;color:var(--muted);text-decoration:none}
figure header a:hover,figure header a:focus{text-decoration:underline}
figure svg.chart{display:block;width:100%;height:auto;margin-top:.3rem}
figure svg.chart text{font-family:inherit}
figcaption{font-size:.8rem;color:var(--muted)}
.key{display:flex;flex-wrap:wrap;gap:.1rem 1rem;margin:.3rem 0 0;padding:0;list-style:none;color:var(--ink)}
.key li{display:flex;align-items:center;gap:.4rem;overflow-wrap:anywhere}
.key svg{flex:none}
td svg,th svg{margin-right:.45rem}
.facts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,11rem),1fr));gap:.7rem;margin:0}
.facts div{background:var(--panel);border-radius:8px;padding:.55rem .8rem;min-width:0}
.facts dt{font-size:.78rem;color:var(--muted)}
.facts dd{margin:0;font-size:1.12rem;font-weight:600;overflow-wrap:anywhere;font-variant-numeric:tabular-nums}
.facts dd small{display:block;font-size:.75rem;font-weight:400;color:var(--muted)}
.scroll{overflow-x:auto;border:1px solid var(--line);border-radius:8px}
table{border-collapse:collapse;width:100%;font-size:.87rem;font-variant-numeric:tabular-nums}
th,td{padding:.38rem .7rem;text-align:left;vertical-align:top;border-bottom:1px solid var(--line)}
th{font-weight:600;color:var(--muted);background:var(--panel);white-space:nowrap}
tbody th{color:var(--ink);background:none;font-weight:500}
tr:last-child>td,tbody tr:last-child>th{border-bottom:0}
td.n,th.n{text-align:right}
td.n{white-space:nowrap}
td.n.changed{white-space:normal;overflow-wrap:anywhere;min-width:6rem;max-width:18rem}
th.n{white-space:normal}
.scroll th:first-child,.scroll td:first-child{position:sticky;left:0;background:var(--paper)}
.scroll thead th:first-child{background:var(--panel)}
td.name{white-space:nowrap}
td.state-of{min-width:9.5rem}
td.text{overflow-wrap:anywhere}
td small{color:var(--muted)}
summary{cursor:pointer}
td.changed{background:var(--changed)}
td b{font-weight:700}
.state{display:inline-block;padding:0 .5em;border-radius:.7em;font-size:.82rem;max-width:22rem;font-weight:600;border:1px solid currentColor}
.done{color:var(--p0)}.running{color:var(--p3)}.stopped,.silent,.unknown{color:var(--muted)}.failed{color:var(--p4)}
.config{columns:26rem;column-gap:2rem}
.config th{width:1%}
.config th,.config td{padding-left:.2rem}
h3.common{margin:1.3rem 0 .4rem}
.config tr{break-inside:avoid}
ul.notes{margin:.4rem 0;padding-left:1.2rem}
pre{background:var(--panel);padding:.8rem 1rem;border-radius:8px;overflow-x:auto;font-size:.84rem;line-height:1.45}
footer{margin-top:2.6rem;border-top:1px solid var(--line);padding-top:.7rem}
@media print{
 html{font-size:10.5px}
 body{max-width:none;padding:0;font-size:10.5px}
 .charts{grid-template-columns:1fr 1fr}
 figure,.facts div,pre,th{background:none}
 figure,.facts div{border:1px solid var(--line)}
 figure header a{display:none}
 .scroll{overflow:visible;border:0}
 table{font-size:8.5px}
 th,td{padding:.25rem .35rem}
 td.n,td.name,th{white-space:normal}
 td.state-of{min-width:0}
 h2{break-after:avoid}
 tr{break-inside:avoid}
 pre{white-space:pre-wrap}
}
"""
