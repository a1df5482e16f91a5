"""What offload.py stands on: models, a step of each part, blind copies, tiny models to the bit, bars.

    offload.py ─► steps (a process each) ─► models: a Llama with adapters, GPT-2 small, one loss for all
       │            └► baselines: what others have, as a block around a step; blind copies
       ├► budget: steps of varying length under a budget, beside fractions that are set by hand
       ├► exact: tiny models (small) with and without, and what a pack costs on the host
       └► bars: rows to figures with bars
"""
