"""The pictures of the Web UI in docs/img: real tasks on real servers, brought into each state and photographed."""
