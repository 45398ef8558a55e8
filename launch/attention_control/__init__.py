"""Query/key control and attention measurements on this rank's weights, at every ZeRO stage."""
