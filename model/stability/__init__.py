"""Query/key control as pure functions: learning rate policies, clipping, drift and Muon's step."""
