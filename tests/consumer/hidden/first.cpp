#include "tags.hpp"

void on_the_grid(void (*work)(const plait::context<plait::cpu>&)) {
  const house::grid mesh{2, 2};
  plait::threads::run(4, [&](plait::threads::communicator ranks) {
    plait::world world(mesh.shape(), ranks);
    plait::cpu device;
    plait::dim_sizes sizes;
    sizes.set(plait::dim_of<house::points>, 8), sizes.set(plait::dim_of<house::width>, 4);
    sizes.set(plait::dim_of<house::wide>, 6);
    work({device, world, sizes, 1});
  });
}
