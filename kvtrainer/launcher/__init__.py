"""The job behind the command line of `kvlaunch`; nothing here imports torch."""
