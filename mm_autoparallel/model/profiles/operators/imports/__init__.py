"""What others measured of single operators: kernel_details.csv of CANN, and what MindSpeed's Auto Tuning leaves."""
