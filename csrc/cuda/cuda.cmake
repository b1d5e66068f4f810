# The kernels of metal/ for NVIDIA GPUs. Nothing of CUDA is needed to build: the driver and the compiler are found at run time.
file(GLOB cuda_metal_files CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/metal/*.metal)
file(GLOB cuda_metal_headers CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/metal/*.h)
set(generated ${CMAKE_BINARY_DIR}/cuda)
add_custom_command(
  OUTPUT ${generated}/kernels.cpp ${generated}/sources.cpp
  COMMAND ${Python_EXECUTABLE} ${CMAKE_SOURCE_DIR}/metal/generate_cuda.py ${generated} ${cuda_metal_files}
  DEPENDS ${cuda_metal_files} ${cuda_metal_headers} ${CMAKE_SOURCE_DIR}/metal/generate.py
          ${CMAKE_SOURCE_DIR}/metal/generate_cuda.py ${CMAKE_SOURCE_DIR}/csrc/cuda/msl.h
  COMMENT "Translating the Metal kernels to CUDA" VERBATIM)
file(GLOB cuda_sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/csrc/cuda/*.cpp)
add_library(ds4_cuda STATIC ${cuda_sources} ${CMAKE_SOURCE_DIR}/csrc/metal_standin/foundation.cpp
            ${CMAKE_SOURCE_DIR}/csrc/metal_standin/shared.cpp ${generated}/kernels.cpp
            ${generated}/sources.cpp)
target_link_libraries(ds4_cuda PUBLIC ds4_core ${CMAKE_DL_LIBS})
target_include_directories(ds4_cuda PUBLIC ${CMAKE_SOURCE_DIR}/csrc/metal_standin/include)
target_compile_definitions(ds4_cuda PUBLIC DS4_CUDA=1)
