"""How two models disturb each other, and what a smaller batch costs (SJF-BSBF)."""
