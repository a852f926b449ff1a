"""How throughput depends on CPUs and memory (Synergy)."""
