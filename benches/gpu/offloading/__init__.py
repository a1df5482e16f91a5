"""The parts of offload.py: models, training steps, blind copies, exact comparisons of tiny models, bars.

    offload.py ─► steps (a process each) ─► models: a Llama with adapters, GPT-2 small, one loss for all
       │            └► baselines: what others have, as a block around a step; blind copies
       ├► budget: steps of varying length under a budget, beside fractions that are set by hand
       ├► exact: tiny models (small) with and without, and what a pack costs on the host
       ├► digest: saved tensors at full size, as they leave and as they come back
       ├► bare: what links carry by themselves;  host: host memory that is touched before anything is measured
       └► bars: rows to figures with bars
"""
