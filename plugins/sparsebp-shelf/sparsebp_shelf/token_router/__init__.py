"""Send some positions through each layer of the training forward."""

from sparsebp_shelf.token_router.kind import TOKEN_ROUTER, RoutedLayer, TokenRouter
from sparsebp_shelf.token_router.random_ltd import RandomLTD

__all__ = ["TOKEN_ROUTER", "RandomLTD", "RoutedLayer", "TokenRouter"]
