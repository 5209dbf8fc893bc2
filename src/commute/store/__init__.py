# SPDX-License-Identifier: Apache-2.0
"""The store: tables on servers, two verbs, clocks.

store     Store: a named set of tables
table     DenseTable: push, pull, push_pull and what can be asked of a tensor
updates   what a contribution does to a value
initial   what a row holds that nobody has pushed
links     a worker's way to the servers, and waiting for them
gather    starting the servers, joining them, dialling their shards
server    a server process
"""
