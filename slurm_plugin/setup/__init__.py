"""What Slurm's configuration files need for Muri, as edits that can be taken back byte for byte."""
