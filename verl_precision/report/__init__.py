"""One page about one or more runs: curves, table and alarms, from the metrics they left.

read     what a run measured: verl's metrics file, a console log or TensorBoard events
panels   which metrics are shown, and how
figures  the curves, as SVG
page     the page, one HTML file that needs nothing else
command  `verl-precision report`
"""
