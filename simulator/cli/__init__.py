"""The commands `muri simulate` and `muri trace`."""
