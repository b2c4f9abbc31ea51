"""What a training's plan breaks or wastes, as findings: rules over a job and its simulated plan, and SARIF."""
