"""Engines: they give a program its clock. All of them answer ``run(program)`` with the same timeline."""
