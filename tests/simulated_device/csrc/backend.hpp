// What the module needs of the device that torch sees.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "order.hpp"

namespace sim {

// Whether the device is there: torch.sim.is_available, and whether memory may be taken.
extern bool present;

int current_device();
int current_agent(int device);
// Seed and offset of a device's generator.
std::pair<uint64_t, uint64_t> generator_state(int device);
void set_generator_state(int device, uint64_t seed, uint64_t offset);
// Within a kernel, whose operations on the CPU are not the host's own.
bool in_kernel();

}  // namespace sim
