"""Training loops of other libraries, made private. Each needs the package that it is for; nothing imports them."""
