"""What a person is shown of a compilation: tables, pages, pictures, files. Decides nothing."""
