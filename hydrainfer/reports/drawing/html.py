"""HTML pages: one file each, with style and figures inside, which need no network."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

STYLE = """
:root{color-scheme:light dark;--ink:#1c2024;--soft:#5b6470;--text:#3a424b;--paper:#fff;--tint:#f3f5f7;--rule:#d8dce0;
--line:#e8ebee;--grid:#e6e9ec;--axis:#8a929b;--warn:#b5484f;--mark:#2f6db3}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ec;--soft:#a3acb6;--text:#c8ced4;--paper:#15181b;--tint:#22272c;
--rule:#3a424b;--line:#2a3036;--grid:#2a3036;--axis:#7c858f;--warn:#e2777d;--mark:#6ea6e6}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:1000px;margin:32px auto;
padding:0 20px}h1{font-size:25px;margin:0 0 4px}h2{font-size:18px;margin:34px 0 8px;border-bottom:1px solid
var(--rule);padding-bottom:4px}h3{font-size:15px;margin:14px 0 2px}table{border-collapse:collapse;font-size:13px;
margin:8px 0;width:100%}th,td{padding:4px 10px 4px 0;text-align:left;border-bottom:1px solid var(--line);
vertical-align:top}td.n,th.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
code{font:12.5px ui-monospace,monospace;background:var(--tint);padding:1px 4px;border-radius:3px;overflow-wrap:anywhere}
.sub{color:var(--soft);margin:0 0 14px}
.pair{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:10px 24px}
.whole td,.whole th{white-space:nowrap;font-size:12px}
svg{width:100%;height:auto;font:11.5px system-ui,sans-serif;fill:var(--text)}.grid{stroke:var(--grid)}
.axis{fill:none;stroke:var(--axis)}.ink{fill:none;stroke:var(--ink)}.faint{fill:var(--soft)}
.halo{paint-order:stroke;stroke:var(--paper);stroke-width:4px}
.limit{stroke:var(--warn);stroke-dasharray:5 4}.note{fill:var(--warn)}.legend{font-size:13px;margin:2px 0 6px}.legend
span{margin-right:16px;white-space:nowrap}.legend i{display:inline-block;width:11px;height:11px;border-radius:2px;
margin-right:5px;vertical-align:-1px}.scroll{overflow-x:auto}li{margin:3px 0}
.answer{font-size:17px;line-height:1.45;background:var(--tint);border-left:4px solid var(--mark);padding:12px 16px;
margin:0 0 10px}
.answer p{margin:0}.answer p+p{margin-top:6px;font-size:15px;color:var(--text)}
@media(max-width:760px){body{margin:16px auto;padding:0 14px}h1{font-size:21px}
.pair{grid-template-columns:minmax(0,1fr)}svg{font-size:14px}.legend span{display:inline-block}.answer{font-size:15px}}
"""


def document(title: str, body: str, style: str = "") -> str:
    """A whole HTML document; `style`: CSS in addition to the common `STYLE`."""
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    head += f"<title>{escape(title)}</title>"
    return (
        f'<!doctype html><html lang="en"><head>{head}<style>{STYLE}{style}</style></head><body>{body}</body></html>\n'
    )


def answered(sentences: Sequence[str]) -> str:
    """The box at the head of a page with its conclusion, a paragraph for each sentence. `sentences` are plain text."""
    return "<div class=answer>" + "".join(f"<p>{escape(line)}</p>" for line in sentences) + "</div>"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], n_left: int = 1, n_last: int = 0) -> str:
    """An HTML table. Cells are HTML; the first `n_left` columns and the last `n_last` hold text, the others numbers."""
    numbers = range(n_left, len(head) - n_last)

    def cells(kind: str, row: Sequence[str]) -> str:
        return "".join(f"<{kind}{' class=n' if i in numbers else ''}>{c}</{kind}>" for i, c in enumerate(row))

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f"<div class=scroll><table><thead><tr>{cells('th', head)}</tr></thead><tbody>{body}</tbody></table></div>"
