"""The referee of credit assignment: snapshots of policies with true advantages, and the scores of estimators on them."""
