"""Sub-batches: a batch of B samples runs as s micro-batches of B/s whose gradients are accumulated.

`accumulate` is what scripts call, `planned` says which s is in effect, `splitting` cuts a batch, `losses` reads from
the graph what a loss averages over, and `loop`, `gradients` and `hooks` do it for scripts that call nothing. See
docs/sub-batches.md.
"""
