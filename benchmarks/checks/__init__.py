"""Sections of `gpu_check`, one module each, with `run(report)`."""
