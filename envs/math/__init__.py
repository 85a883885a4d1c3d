"""Mathematics in text: generated problems or those of GSM8K and MATH, a calculator, and answers that are checked."""
