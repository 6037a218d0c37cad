/* Is a descriptor safe to execute?  The rules are in op_rules.h. */
#include "op_rules.h"

ep_status ep_op_check_own(const struct ep_layout_map *map, const struct ep_regions *regions, const struct ep_op *op,
                          struct ep_error *error)
{
    const struct check c = {
        .limits = &map->limits, .arena = map->arena, .op = op, .regions = regions, .error = error
    };

    return check_op(&c);
}

ep_status ep_op_check(const struct ep_layout_map *map, const struct ep_op *op, struct ep_error *error)
{
    return ep_op_check_own(map, NULL, op, error);
}
