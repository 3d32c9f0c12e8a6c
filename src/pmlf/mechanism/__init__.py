"""What makes a sum private: sampling, noise, filters, accounting and the theory behind them."""
