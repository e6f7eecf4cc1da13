"""Training networks in plain MindSpore cells, each built by a function `factory(**settings) -> (network, inputs)`."""
