"""Building blocks shared by the methods: heads, queues, metrics."""
