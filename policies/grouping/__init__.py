"""From the jobs of a bucket to groups: Algorithm 1 and the exact formulation."""
