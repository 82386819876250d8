"""Sliders over the SLOs and the rate, whose answers come from the simulated grid by a script in the page, without a
server."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from hydrainfer.planner.search import LayoutPlan
from hydrainfer.reports.drawing import ms
from hydrainfer.reports.plan.tables import only_epd

STYLE = """
.if{display:grid;grid-template-columns:max-content minmax(0,1fr) max-content;gap:6px 14px;align-items:center;
max-width:640px}.if input{width:100%;accent-color:var(--mark)}.if output{font-variant-numeric:tabular-nums}
#if{background:var(--tint);border-left:4px solid var(--mark);padding:10px 14px;margin:12px 0;max-width:640px}
"""
_SCRIPT = """
{const d=%s,e=i=>document.getElementById(i),f=x=>+x.toPrecision(3),r=()=>{
const t=d.ttft[e('if-t').value],p=d.tpot[e('if-p').value],n=+e('if-r').value;
e('if-to').value=t.said;e('if-po').value=p.said;e('if-ro').value=f(n)+'/s';
const c=d.cells.find(c=>c.ttft==t.s&&c.tpot==p.s),o=e('if');
if(!c||!c.goodput){o.textContent='No layout meets these limits.';return}
const k=Math.max(1,Math.ceil(n/c.goodput));
let s=`${c.layout} carries ${f(c.goodput)} requests/s`;
s+=c.layout==c.epd_layout?', without splitting. ':c.epd?`, ${c.epd_layout} ${f(c.epd)}. `:`, ${c.epd_layout} nothing. `;
s+=`${f(n)} requests/s need ${k==1?'one such deployment':k+' such deployments'} of ${d.hardware}`;
s+=`, at ${Math.round(100*n/k/c.goodput)} %% of what they carry.`;
if(d.price&&n)s+=` 1,000 requests cost ${k>1?k+' × ':''}${f(d.price)} an hour ÷ (${f(n)}/s × 3,600 s) × 1,000`+
` = ${f(d.price*k/n/3.6)}.`;o.textContent=s};
for(const i of['if-t','if-p','if-r'])e(i).oninput=r;r()}
"""


def what_if(plan: LayoutPlan) -> Iterator[str]:
    """The section with the sliders, for a plan with a grid."""
    ttfts = sorted({c.ttft_s for c in plan.grid})
    tpots = sorted({c.tpot_s for c in plan.grid})
    most = max((c.goodput for c in plan.grid), default=0.0)
    if not most:
        return
    epd = only_epd(plan)
    middle = next((c for c in plan.grid if (c.ttft_s, c.tpot_s) == (plan.slo.ttft_s, plan.slo.tpot_s)), plan.grid[0])
    data = {
        "ttft": [{"s": s, "said": f"{ms(s)} ms"} for s in ttfts],
        "tpot": [{"s": s, "said": f"{ms(s)} ms"} for s in tpots],
        "hardware": plan.hardware,
        "price": plan.price,
        "cells": [
            {
                "ttft": c.ttft_s,
                "tpot": c.tpot_s,
                "layout": c.layout,
                "goodput": c.goodput,
                "epd": c.goodput_epd,
                "epd_layout": epd.layout if epd is not None else "EPD",
            }
            for c in plan.grid
        ],
    }
    at = {"if-t": (len(ttfts) - 1, ttfts.index(middle.ttft_s)), "if-p": (len(tpots) - 1, tpots.index(middle.tpot_s))}
    rows = [_slider(i, name, *at[i], 1.0) for i, name in (("if-t", "TTFT SLO"), ("if-p", "TPOT SLO"))]
    rows.append(_slider("if-r", "requests/s", 2 * most, middle.goodput, most / 100))
    yield "<h2>What if</h2>"
    yield f"<div class=if>{''.join(rows)}</div><p id=if></p>"
    yield "<p class=sub>From the grid below: as approximate as that is.</p>"
    script = _SCRIPT % msgspec.json.encode(data).decode().replace("<", "\\u003c")
    yield f"<script>{script}</script>"


def _slider(name: str, label: str, most: float, value: float, step: float) -> str:
    given = f'id={name} type=range min=0 max="{most:.6g}" value="{value:.6g}" step="{step:.6g}"'
    return f"<label for={name}>{label}</label><input {given}><output id={name}o></output>"
