"""Members that are threads of one process. `muri.launcher.threads` is the only way in: it loads `thread_session`."""
