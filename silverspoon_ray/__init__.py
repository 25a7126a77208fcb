"""silverspoon_ray"""
