"""What `kvlaunch` does behind its command line; nothing here imports torch."""
