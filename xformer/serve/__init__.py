"""An HTTP server for models, and a page to explore them; needs the extra `serve`."""
