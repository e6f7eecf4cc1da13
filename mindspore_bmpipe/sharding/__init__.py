"""From a network and the strategies of its operations to what one rank of a stage runs."""
