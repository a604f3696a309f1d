"""One page about one or more runs: curves, table and alarms, from the metrics they left.

read     what a run measured: verl's metrics file, a console log or TensorBoard events
panels   which metrics are shown, and under which names
figures  how each of them looks, here and in what `verl-precision compare` draws
page     the page, one HTML file that needs nothing else
command  `verl-precision report`
"""
