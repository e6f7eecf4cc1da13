"""Reading networks: from live cells, traced files and exported MindIR files to one :class:`CellGraph`."""
