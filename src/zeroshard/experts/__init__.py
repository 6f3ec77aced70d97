"""Expert parallelism: ranks that hold other experts of a layer, and send each other the tokens for them.

A layer with experts routes each token to a few of them. With ``ep`` expert-parallel ranks, a rank holds
1 / ep of the experts, and tokens travel there and back (:mod:`.dispatch`). For ZeRO nothing is special: a
unit belongs to the ranks that hold the same bytes, and for experts these are fewer ranks (:mod:`.marks`).
"""
