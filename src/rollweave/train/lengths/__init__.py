"""Regressors of remaining lengths.

Their modules need scikit-learn or torch; `registry` imports them when one is built.
"""
