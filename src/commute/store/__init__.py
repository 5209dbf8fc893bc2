# SPDX-License-Identifier: Apache-2.0
"""The store: tables on servers, two verbs, clocks.

store     Store: a named set of tables
table     DenseTable: push, pull, push_pull and what can be asked of a tensor
updates   what a contribution does to a value
initial   what a row holds that nobody has pushed
saving    writing a checkpoint, all ranks together
loading   reading one
segments  the files of a checkpoint: safetensors
manifest  what they are, and how a new checkpoint replaces an old one
links     a worker's way to the servers, and waiting for them
gather    starting the servers, joining them, dialling their shards; start: one of them
server    a server process of a job

connection   commute.connect: a client of `commute serve`
observer     the store of such a client, and its way to the server
serve        the process of `commute serve`
status       what such a server tells of itself, as data and as text
"""
