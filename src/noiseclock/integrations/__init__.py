"""Noiseclock in other people's trainers, one module for each; nothing is imported until its module is."""
