"""The device mesh, layout tables and the exchange of tokens with experts."""
