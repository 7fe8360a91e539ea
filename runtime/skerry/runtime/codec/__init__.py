"""How tensors become payload objects and come back: `layout` says where bytes stand, `container` is the format,
`reading` fetches and verifies, `tensors` ties them to torch. Import the module: only `tensors` needs torch.
"""
