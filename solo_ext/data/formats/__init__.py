"""What images are kept in, besides folders and torchvision's data sets."""
