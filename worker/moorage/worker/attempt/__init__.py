"""What an attempt is given and leaves: environment, folder, files, secrets, output."""
