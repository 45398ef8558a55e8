"""Control of the query/key weights, as pure functions."""
