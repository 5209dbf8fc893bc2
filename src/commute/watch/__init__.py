# SPDX-License-Identifier: Apache-2.0
"""What happened: the recorder of each rank's last operations."""
