"""What the pages under docs/ show of the project itself: quoted code, options, figures of runs.

`python -m pages quotes` writes the quotes anew, `python -m pages options` the tables of options,
`python -m pages figures [NAME ...]` the figures, `notebooks` the chapters as notebooks, `animation`
the moving picture of the README.
It stands beside `bench/`, outside the package and outside docs/, because a site generator copies
whatever lies under docs/ to the reader.
"""
