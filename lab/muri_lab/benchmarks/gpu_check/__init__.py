"""What Muri does on a real GPU, part by part: `scripts/gpu-check`."""
