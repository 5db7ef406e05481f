"""Experiments with the library: data sets, metrics, recipes, sweeps, tables of results. Needs the extra `data`."""
