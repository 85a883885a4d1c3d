"""Tables of runs: one file plans the cells, the cells are run or launched, and existing results are collected.

A plan (`configs/tables/*.yaml`, `plan.Plan`) names settings (environment x model), methods and tables of them. A cell is a
setting, a method and a seed; it lives in the run folder RUNS/SETTING/METHOD/sSEED.
"""
